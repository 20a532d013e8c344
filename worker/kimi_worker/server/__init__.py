"""The API process of a worker pod: OpenAI's HTTP API in front of the pod's lanes. Never imports torch."""
