"""Communication between ranks: sessions, links, groups, the error board."""
