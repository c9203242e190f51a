"""How a model is cut over ranks: the partition dimension of every parameter, the ranks' layout, resharding."""
