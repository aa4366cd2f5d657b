"""Shows what runs left in their folders: pages, live or saved, and reports. Needs no torch."""
