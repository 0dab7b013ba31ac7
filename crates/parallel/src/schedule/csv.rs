//! Schedules as torch writes them (`torch.distributed.pipelining`): a row for each rank, a cell for each instruction.

use std::collections::BTreeMap;

use candle_core::{Result, bail};

use super::{Instruction, Message, Plan, Unit};
use crate::pipeline_layout::PipelineLayout;

impl Instruction {
    /// As torch writes it: `0F2` is the forward pass of micro-batch 2 in stage 0, `I` an input gradient, `W` a weight gradient, `B` both at
    /// once; a message is that of its unit.
    pub fn cell(self) -> String {
        let letter = match self {
            Self::Forward(_) => "F",
            Self::Backward(_) => "B",
            Self::InputGrad(_) => "I",
            Self::WeightGrad(_) => "W",
            Self::Send(_, Message::Activation) => "SEND_F",
            Self::Send(_, Message::Gradient) => "SEND_B",
            Self::Recv(_, Message::Activation) => "RECV_F",
            Self::Recv(_, Message::Gradient) => "RECV_B",
        };
        let Unit { stage, micro_batch } = self.unit();
        format!("{stage}{letter}{micro_batch}")
    }
}

impl Plan {
    /// The lists as torch writes them, a row for each rank: see [`Instruction::cell`].
    pub fn to_csv(&self) -> String {
        let row = |list: &Vec<Instruction>| {
            let cells = list.iter().map(|instruction| instruction.cell());
            cells.collect::<Vec<_>>().join(",") + "\n"
        };
        self.ranks().iter().map(row).collect()
    }

    /// The schedule of such a text. Empty cells are times in which a rank waits, and `(0F4;7B3)OVERLAP_F_B` is one instruction after the
    /// other. Messages (`0SEND_F2`, `1RECV_F2`) are left out: they follow from the rest. In texts of earlier versions, which have `W` and no `I`, `B` is the input gradient.
    ///
    /// # Errors
    /// A cell that is none of these, with its row and column; stages of no rank or of several; and as for [`Self::of_lists`].
    pub fn from_csv(text: &str) -> Result<Self> {
        let rows = text.trim_start_matches('\u{feff}').lines().enumerate();
        let rows = rows.filter(|(_, line)| !line.trim().is_empty());
        let (rows, lines): (Vec<usize>, Vec<&str>) = rows.unzip();
        if rows.is_empty() {
            bail!("there is no row of instructions; expected one for each rank");
        }
        let lists = rows.iter().zip(lines).map(|(row, line)| {
            let cells = line.split(',').enumerate();
            let cells = cells.filter(|(_, cell)| !cell.trim().is_empty());
            let cells = cells.map(|(column, cell)| {
                match parse_cell(cell.trim()) {
                    Some(instructions) => Ok(instructions),
                    None => bail!(
                        "row {}, column {}: {:?} is no instruction; expected a stage, a letter of F, I, W and B, and a micro-batch below \
                         {MAX_NUMBER}, such as 0F2, or two of these, such as (0F4;7B3)OVERLAP_F_B",
                        row + 1,
                        column + 1,
                        cell.trim()
                    ),
                }
            });
            Ok(cells.collect::<Result<Vec<_>>>()?.concat())
        });
        let mut lists = lists.collect::<Result<Vec<Vec<Instruction>>>>()?;
        let has = |is: fn(&Instruction) -> bool| lists.iter().flatten().any(is);
        if has(|it| matches!(it, Instruction::WeightGrad(_)))
            && !has(|it| matches!(it, Instruction::InputGrad(_)))
        {
            for instruction in lists.iter_mut().flatten() {
                if let Instruction::Backward(unit) = *instruction {
                    *instruction = Instruction::InputGrad(unit);
                }
            }
        }
        let mut ranks = BTreeMap::new();
        let mut num_micro_batches = 0;
        for (rank, list) in lists.iter().enumerate() {
            for instruction in list {
                let Unit { stage, micro_batch } = instruction.unit();
                let known = *ranks.entry(stage).or_insert(rank);
                if known != rank {
                    bail!(
                        "row {} has the {instruction}, and row {} other work of this stage; expected each stage on one rank",
                        rows[rank] + 1,
                        rows[known] + 1
                    );
                }
                num_micro_batches = num_micro_batches.max(micro_batch + 1);
            }
        }
        if let Some(missing) = (0..ranks.len()).find(|stage| !ranks.contains_key(stage)) {
            bail!(
                "no row has work of stage {missing}; expected that of stages 0 to {}",
                ranks.len()
            );
        }
        let ranks: Vec<usize> = ranks.into_values().collect();
        let layout = PipelineLayout::new(&vec![1; ranks.len()], &ranks)?;
        Self::of_lists(&layout, num_micro_batches, lists)
    }
}

/// What a cell stands for; nothing if it is a message.
fn parse_cell(cell: &str) -> Option<Vec<Instruction>> {
    let pair = cell
        .strip_prefix('(')
        .and_then(|cell| cell.strip_suffix(")OVERLAP_F_B"));
    let Some(pair) = pair else {
        return Some(parse_instruction(cell)?.into_iter().collect());
    };
    let (first, second) = pair.split_once(';')?;
    Some(vec![
        parse_instruction(first)??,
        parse_instruction(second)??,
    ])
}

/// Stages and micro-batches are below this.
const MAX_NUMBER: usize = 1 << 20;

fn number(digits: &str) -> Option<usize> {
    let number = digits.parse().ok();
    number.filter(|number| *number < MAX_NUMBER)
}

/// An instruction; `None` inside for a message.
fn parse_instruction(cell: &str) -> Option<Option<Instruction>> {
    let letters = cell.trim_matches(|letter: char| letter.is_ascii_digit());
    let (stage, micro_batch) = cell.split_once(letters)?;
    let unit = Unit {
        stage: number(stage)?,
        micro_batch: number(micro_batch)?,
    };
    Some(match letters {
        "F" => Some(Instruction::Forward(unit)),
        "I" => Some(Instruction::InputGrad(unit)),
        "W" => Some(Instruction::WeightGrad(unit)),
        "B" => Some(Instruction::Backward(unit)),
        "SEND_F" | "SEND_B" | "RECV_F" | "RECV_B" => None,
        _ => return None,
    })
}
