import json

with open("/mnt/project/labels.json") as file:
    labels = json.load(file)


def post_inference(prediction, metadata):
    class_id = int(prediction["class_ids"][0])
    return {
        "class_label": labels[class_id],
        "class_index": class_id,
        "probabilities": prediction["probabilities"],
        "inputs": sorted(metadata["predict"]["inputs"]),
    }
