"""Pages and screens: how many of their patches are duplicates, and what a vision tower saves by leaving these out."""
