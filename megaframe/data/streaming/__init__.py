"""Sources that are read as streams: tokenised while the run trains, or of many token files."""
