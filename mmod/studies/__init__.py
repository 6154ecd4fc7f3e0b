"""Trade-off studies: dense, routed and control models compared."""
