"""Tools that come with the product, made as users' own are."""
