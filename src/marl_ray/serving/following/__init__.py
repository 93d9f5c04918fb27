"""A replica follows the store: it takes over states, holds the arms that serve, and decides on the evidence."""
