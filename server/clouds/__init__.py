"""Clouds: Triton's front ends for Amazon SageMaker and Vertex AI, which route requests to what the HTTP port serves."""
