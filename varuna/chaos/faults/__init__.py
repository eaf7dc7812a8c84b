"""The faults: functions that inject one, by what they harm."""
