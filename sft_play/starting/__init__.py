"""How a run starts: in this process, over ranks that are started here, or as a rank that a launcher started."""
