"""What runs next in a lane, and which pages and slots it owns. No torch, no I/O."""
