"""The capture server: any agent that speaks the OpenAI API, its calls kept as exact ids and log-probs."""
