"""Models of ours: BERT and ResNet, served without writing code."""
