"""Post-training weight quantization: calibration statistics, RTN, AWQ and GPTQ."""
