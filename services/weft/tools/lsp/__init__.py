"""``weft lsp``: a language server for graphs and configurations of models."""
