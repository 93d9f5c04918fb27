"""Forward passes for decoding: of any transformers model, and a short one for the Llama family."""
