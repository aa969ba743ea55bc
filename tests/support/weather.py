"""The weather of a city, as a schema for answers and calls."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=8)
    days: Literal["one", "two"]
