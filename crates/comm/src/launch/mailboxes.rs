//! Ranks that have nothing between them but messages.

use std::sync::Arc;
use std::thread::{Builder, scope};

use candle_core::{Device, Result, bail};
use candle_launch::Control;

use super::cannot_start::{known, meeting_begins};
use crate::cores::{catch_panic, num_cores, panic_message, pool_of_rank};
use crate::{Mailbox, MailboxConfig, RunConfig, message_of};

/// Runs `run` on the ranks of this process, each with its mailbox, and returns what they return: on `world_size` threads, by rank, or on the
/// one rank that this process is if a launcher has started several.
///
/// Processes meet first, as in [`run`](super::run), which compares [`RunConfig::fingerprint`]. Then they are connected: the first
/// `num_serving` ranks with all, the others with these. From then on the death of a rank ends no other: they hear of it by
/// [`Received::Left`](crate::Received::Left). What `run` returns is the rank's farewell: if it is an error the others get its message.
///
/// # Errors
/// What keeps the ranks from meeting, or threads from being started; the inner ones are those of ranks, panics among them.
pub fn mailboxes<T: Send>(
    config: &RunConfig,
    (world_size, num_serving): (usize, usize),
    run: impl Fn(&Arc<Mailbox>) -> Result<T> + Sync,
) -> Result<Vec<Result<T>>> {
    let mail = MailboxConfig {
        deadline: config.deadline,
        silence: config.rank_timeout,
        ..MailboxConfig::default()
    };
    // Ranks that serve leave their cores to the others, for which they wait.
    let num_others = world_size.saturating_sub(num_serving).max(1);
    let on_host = match config.env.world_size() {
        1 => num_others,
        num_ranks => (config.env.local_world_size() * num_others).div_ceil(num_ranks),
    };
    let threads_per_rank = config
        .threads_per_rank
        .unwrap_or(num_cores() / on_host.max(1));
    // As long as it lives it turns away who comes too late.
    let (mailboxes, _control) = match config.env.world_size() {
        1 => (Mailbox::of_threads(world_size, &mail), None),
        _ => {
            let (mailbox, control) = meet(config, (world_size, num_serving), &mail)?;
            (vec![mailbox], Some(control))
        }
    };
    scope(|scope| {
        let mut ranks = Vec::new();
        for mailbox in mailboxes {
            let pool = pool_of_rank(mailbox.rank(), threads_per_rank, &Device::Cpu);
            let (run, pool) = (&run, pool.map_err(candle_core::Error::wrap)?);
            let rank_main = move || pool.install(|| run_rank(mailbox, run));
            ranks.push(Builder::new().spawn_scoped(scope, rank_main)?);
        }
        let results = ranks.into_iter().map(|rank| match rank.join() {
            Ok(result) => result,
            Err(panic) => bail!("panicked: {}", panic_message(&*panic)),
        });
        Ok(results.collect())
    })
}

/// Runs one rank and tells the others how it ended.
fn run_rank<T>(mailbox: Mailbox, run: impl Fn(&Arc<Mailbox>) -> Result<T>) -> Result<T> {
    let mailbox = Arc::new(mailbox);
    let result = catch_panic(|| run(&mailbox));
    match &result {
        Ok(_) => mailbox.leave(),
        Err(error) => mailbox.fail(&message_of(error)),
    }
    result
}

/// This process's mailbox, once the ranks have met, and what they have met by.
fn meet(
    config: &RunConfig,
    (world_size, num_serving): (usize, usize),
    mail: &MailboxConfig,
) -> Result<(Mailbox, Arc<Control>)> {
    let env = &config.env;
    if env.world_size() != world_size {
        bail!(
            "{world_size} ranks are needed, but {} started {} processes",
            env.started_by(),
            env.world_size()
        );
    }
    meeting_begins();
    let control_config = config.control(env.master().map_err(candle_core::Error::wrap)?);
    let control = Control::join(&control_config).map_err(known)?;
    let streams = control.connect_peers(num_serving);
    let streams = streams.map_err(candle_core::Error::wrap)?;
    let mailbox = Mailbox::of_process(env.rank(), streams, mail)?;
    // From here on they notice by themselves who is gone.
    control.leave().map_err(candle_core::Error::wrap)?;
    Ok((mailbox, control))
}
