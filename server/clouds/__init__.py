"""Clouds: Triton's front ends for Amazon SageMaker and Vertex AI, routers before what the HTTP port serves."""
