"""Programs of benchmarks that run inside the sandbox, and never in the product's own process."""
