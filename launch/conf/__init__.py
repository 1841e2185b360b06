"""The YAML groups of the sweeps, as a package so that an installed wheel can find them."""
