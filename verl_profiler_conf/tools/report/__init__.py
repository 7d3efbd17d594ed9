"""Reading what captures left: traces, manifests, and whether the two agree."""
