"""Peak of known GPUs, for the model FLOP utilisation (MFU)."""

PEAKS = {
    "B200": 2250e12,
    "B100": 1750e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 150e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX A6000": 155e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Dense operations per second in 16 bits, as the vendor states them, by a part of the device's name."""


def peak_flops(device: str, precision: str) -> float:
    """Return the peak of a device in a precision; 0: unknown. In fp32 it depends on TF32: unknown."""
    if precision not in ("bf16", "fp16"):
        return 0.0
    words = device.replace("-", " ").split()
    for name, peak in PEAKS.items():
        wanted = name.split()
        if any(words[i : i + len(wanted)] == wanted for i in range(len(words))):
            return peak
    return 0.0
