"""The built-in rendered worlds, plain and rich, and how they are drawn."""
