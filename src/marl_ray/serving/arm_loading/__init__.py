"""Loading of arms: which arms the experiments of a replica need, and how they are loaded and dropped."""
