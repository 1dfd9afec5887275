"""Language models behind the API that clients of OpenAI speak."""
