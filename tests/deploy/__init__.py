"""The files of a deployment, held to what the service needs from its platform: rendered, parsed, compared."""
