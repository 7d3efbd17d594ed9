"""Reading traces of any size: their events, what the events say, and parts of them."""
