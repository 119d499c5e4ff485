"""A failing graph made small: what fails stays, all else goes."""
