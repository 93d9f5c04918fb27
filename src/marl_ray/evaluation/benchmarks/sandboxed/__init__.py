"""Programs of benchmarks that run inside the sandbox; the product never imports them to run them itself."""
