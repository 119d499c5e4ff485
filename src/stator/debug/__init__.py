"""Tools that look at compilations; nothing of the compiler imports them."""
