"""The head of every graph: from the step record to the derived buffers."""
