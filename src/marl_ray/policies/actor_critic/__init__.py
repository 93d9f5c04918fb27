"""Small policies: an actor and critics on vectors and images, their networks, spaces and distributions."""
