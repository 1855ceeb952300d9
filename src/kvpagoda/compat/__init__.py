"""The faces of four existing designs, thin and over the same core: names and behaviours are theirs."""
