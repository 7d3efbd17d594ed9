"""One gate, one recorder, one folder: from a verdict to a manifest. `backends` are the device profilers."""
