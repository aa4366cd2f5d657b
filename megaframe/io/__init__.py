"""Files, texts and processes of the operating system, which may be damaged or hostile."""
