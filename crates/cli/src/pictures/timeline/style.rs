//! What the parts of a step are called and how they look.

use plotters::style::RGBColor;

/// A use of time; its number is its place in [`Self::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Category {
    Forward,
    Backward,
    InputGrad,
    WeightGrad,
    Optimizer,
    Idle,
    Data,
    Evaluation,
    Checkpoint,
    /// The rest of a step, which is nothing else.
    Step,
    /// Operations in flight, beside whatever the rank does.
    InFlight,
    /// Operations in flight while the rank is not idle.
    Hidden,
}

/// Of text that explains.
pub(super) const GREY: RGBColor = RGBColor(0x6b, 0x72, 0x80);
/// Of lines behind.
pub(super) const GRID: RGBColor = RGBColor(0xe4, 0xe7, 0xec);

impl Category {
    /// All of them, in the order in which they are listed.
    pub const ALL: [Self; 12] = [
        Self::Forward,
        Self::Backward,
        Self::InputGrad,
        Self::WeightGrad,
        Self::Optimizer,
        Self::Idle,
        Self::Data,
        Self::Evaluation,
        Self::Checkpoint,
        Self::Step,
        Self::InFlight,
        Self::Hidden,
    ];

    /// The category of an event whose `cat` is `name`. In flight and hidden are computed, and no event's.
    pub fn named(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        let found = all.find(|category| category.name() == name);
        found.filter(|category| ![Self::InFlight, Self::Hidden].contains(category))
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Step => "step",
            Self::InFlight => "in flight",
            Self::Hidden => "hidden",
            Self::Data => "data",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::InputGrad => "input gradient",
            Self::WeightGrad => "weight gradient",
            Self::Optimizer => "optimizer",
            Self::Evaluation => "evaluation",
            Self::Checkpoint => "checkpoint",
            Self::Idle => "idle",
        }
    }

    /// Above its column of shares, where there is less room.
    pub fn short_name(self) -> &'static str {
        match self {
            Self::InputGrad => "input",
            Self::WeightGrad => "weight",
            Self::Step => "other",
            _ => self.name(),
        }
    }

    /// Whether its share of a step is shown though it is nothing.
    pub fn is_common(self) -> bool {
        !matches!(
            self,
            Self::InputGrad | Self::WeightGrad | Self::Data | Self::Evaluation | Self::Checkpoint
        )
    }

    /// The rest of a step has the colour of the paper.
    pub fn color(self) -> RGBColor {
        match self {
            Self::Step => RGBColor(0xff, 0xff, 0xff),
            Self::InFlight => RGBColor(0xe0, 0x7b, 0x1f),
            Self::Hidden => RGBColor(0xf5, 0xc2, 0x8a),
            Self::Data => RGBColor(0xb8, 0x9b, 0x2c),
            Self::Forward => RGBColor(0x3b, 0x76, 0xc4),
            Self::Backward => RGBColor(0x2a, 0x9d, 0x78),
            Self::InputGrad => RGBColor(0x2f, 0x8f, 0x9d),
            Self::WeightGrad => RGBColor(0x6f, 0x9f, 0x3f),
            Self::Optimizer => RGBColor(0x8b, 0x5f, 0xbf),
            Self::Evaluation => RGBColor(0xb2, 0x4c, 0x74),
            Self::Checkpoint => RGBColor(0x7a, 0x68, 0x58),
            Self::Idle => RGBColor(0xd9, 0xdd, 0xe3),
        }
    }
}
