"""Pure decisions: what is wanted, what is seen and the time in; what to do out."""
