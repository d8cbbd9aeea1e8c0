"""Control planes that are not there: what they promise about containers is kept by namespaces of this host."""
