"""Of `ts.handler_utils.utils` handlers use what sends an answer in pieces."""

raise ImportError(
    "Answers in pieces (send_intermediate_predict_response) are not served: return each answer "
    "whole from handle."
)
