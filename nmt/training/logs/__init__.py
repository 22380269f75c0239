"""Where the numbers and pictures of training go."""
