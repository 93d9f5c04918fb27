"""A replica follows the store: it takes over states, and decides on the evidence."""
