"""Models of several sizes trained with the same FLOPs: where the loss is least, dense and routed."""
