"""From bare GPU hosts to an accepted Kimi K3 service on vLLM."""
