//! What the command line says.

use std::str::FromStr;

use crate::operation::Operation;

const USAGE: &str = "\
bench_mpi [--ops NAME,..] [--sizes SIZE,..] [--samples N] [--secs SECS] [--nonblocking]

  --ops NAME,..     all_reduce, all_reduce_in_place, all_gather, reduce_scatter, broadcast, all_to_all, ping_pong
                    [default: all_reduce]
  --sizes SIZE,..   of a rank's larger tensor, in bytes, or with K, M or G in KiB, MiB or GiB [default: 64M]
  --samples N       at most, for each case, at least 3 [default: 15]
  --secs SECS       for the samples of a case, if that makes at least 3 [default: 30]
  --nonblocking     compares with MPI's nonblocking calls, polled";

pub struct Arguments {
    pub ops: Vec<Operation>,
    pub sizes: Vec<usize>,
    pub samples: usize,
    pub secs: f64,
    pub nonblocking: bool,
}

impl Arguments {
    /// Ends the process if they are wrong, or ask for help.
    pub fn from_env() -> Self {
        let mut words = std::env::args().skip(1);
        Self::parse(|| words.next()).unwrap_or_else(|message| {
            if message.is_empty() {
                println!("{USAGE}");
                std::process::exit(0)
            }
            eprintln!("error: {message}\n\n{USAGE}");
            std::process::exit(2)
        })
    }

    fn parse(mut next: impl FnMut() -> Option<String>) -> Result<Self, String> {
        let mut arguments = Self {
            ops: vec![Operation::AllReduce],
            sizes: vec![64 << 20],
            samples: 15,
            secs: 30.,
            nonblocking: false,
        };
        while let Some(flag) = next() {
            match flag.as_str() {
                "-h" | "--help" => return Err(String::new()),
                "--nonblocking" => {
                    arguments.nonblocking = true;
                    continue;
                }
                _ => {}
            }
            let value = next().unwrap_or_default();
            match flag.as_str() {
                "--ops" => arguments.ops = list(&flag, &value, Operation::of_name)?,
                "--sizes" => arguments.sizes = list(&flag, &value, num_bytes)?,
                "--samples" => arguments.samples = number(&flag, &value)?,
                "--secs" => arguments.secs = number(&flag, &value)?,
                _ => return Err(format!("there is no {flag}")),
            }
        }
        match arguments {
            Self { samples, .. } if samples < 3 => Err("--samples: expected at least 3".into()),
            Self { secs, .. } if !(0. ..1e6).contains(&secs) => {
                Err("--secs: expected a number of seconds".into())
            }
            arguments => Ok(arguments),
        }
    }
}

fn list<T>(flag: &str, value: &str, parse: fn(&str) -> Option<T>) -> Result<Vec<T>, String> {
    let items = value
        .split(',')
        .map(|item| parse(item).ok_or_else(|| format!("{flag}: got {item:?}")));
    items.collect()
}

fn number<T: FromStr>(flag: &str, value: &str) -> Result<T, String> {
    (value.parse()).map_err(|_| format!("{flag}: expected a number, got {value:?}"))
}

/// `64M` are 64 MiB.
fn num_bytes(size: &str) -> Option<usize> {
    let unit = ["K", "M", "G"]
        .iter()
        .position(|unit| size.ends_with(unit))
        .map_or(0, |index| index + 1);
    let number: usize = size.trim_end_matches(['K', 'M', 'G']).parse().ok()?;
    number
        .checked_mul(1 << (10 * unit))
        .filter(|bytes| *bytes > 0)
}
