"""The update of one policy by one batch: prepare the batch, take the steps, compute each pass's loss."""
