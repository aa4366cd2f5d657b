"""The layers of a GPT: attention, MLP, experts, norms, embedding, output head and loss."""
