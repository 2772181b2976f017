def post_inference(prediction, signature, metadata):
    # TensorFlow Serving answers with integers of 64 bits as text
    class_id = int(prediction["class_ids"][0])
    return metadata["labels"][class_id]
