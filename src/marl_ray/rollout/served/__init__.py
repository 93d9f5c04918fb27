"""What was served as trajectories: logged acts and texts, and the collector that learns from them."""
