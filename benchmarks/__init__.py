"""How fast the library is, and how much memory it holds, against PyTorch's own tools."""
