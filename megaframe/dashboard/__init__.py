"""What runs left in their folders, for people: pages, live or kept, and reports. Needs no torch."""
