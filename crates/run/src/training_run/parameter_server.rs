//! A run with a parameter server: its first ranks are servers, the others workers.

use std::sync::{Arc, OnceLock};

use candle_comm::{Degrees, Departure, Mailbox, Mesh, RunConfig, launch};
use candle_core::Result;
use candle_trainer::{ParameterServer, Worker};

use crate::memory::allocator::keep_freed_memory;
use crate::training_run::end::End;
use crate::training_run::{Settled, TrainingRun};

impl TrainingRun<'_> {
    /// Runs the ranks of this process, and has the first one of the run told how it ended; and the end of the other rank that is to blame for an
    /// error of a process.
    pub(crate) fn run_with_servers(
        &self,
        num_servers: usize,
        settled: &Settled,
        ranks: &RunConfig,
        tell: impl Fn(End) -> End + Sync,
    ) -> (Result<Vec<End>>, Option<Departure>) {
        let num_workers = self.spec.training.layout.degrees().dp;
        let culprit = OnceLock::new();
        let results =
            launch::mailboxes(ranks, (num_servers + num_workers, num_servers), |mailbox| {
                self.spec.training.ranks.settle();
                let end = match mailbox.rank() < num_servers {
                    true => self.serve(mailbox, num_servers, settled, ranks),
                    false => self.work(mailbox, num_servers).map(|()| End::Complete),
                };
                // An asynchronous run does not end with its workers. Threads end together, whichever of them failed.
                let needed = match self.spec.training.strategy.is_async {
                    true => 0..num_servers,
                    false => 0..mailbox.world_size(),
                };
                let is_process = ranks.env.world_size() > 1;
                if end.is_err()
                    && let Some(departure) = mailbox.blame(needed)
                    && is_process
                {
                    culprit.get_or_init(|| departure);
                }
                let end = end?;
                Ok(if mailbox.rank() == 0 { tell(end) } else { end })
            });
        // Of threads the first, a server, knows how the run ended: it may have gone on without others.
        let ends = results.and_then(|ends| ends.into_iter().take(1).collect());
        (ends, culprit.into_inner())
    }

    fn serve(
        &self,
        mailbox: &Arc<Mailbox>,
        num_servers: usize,
        settled: &Settled,
        ranks: &RunConfig,
    ) -> Result<End> {
        let servers: Vec<usize> = (0..num_servers).collect();
        let degrees = Degrees {
            dp: num_servers,
            ..Degrees::default()
        };
        let mesh = Mesh::new(mailbox.group(&servers)?, degrees)?;
        let consistency = self.spec.training.strategy.consistency();
        let server = ParameterServer::new(mailbox, num_servers, consistency)?;
        self.run_rank(settled, ranks, &mesh, Some(server))
    }

    fn work(&self, mailbox: &Arc<Mailbox>, num_servers: usize) -> Result<()> {
        let worker = Worker::join(mailbox, num_servers, |mesh| self.part(mesh, false))?;
        let Some(worker) = worker else {
            return Ok(());
        };
        let own = mailbox.rank() - num_servers;
        let batches = self
            .spec
            .training
            .training_batches(&self.data.samples, own)?;
        keep_freed_memory();
        worker
            .with_stop(self.stop.asks(&self.observers))
            .train(batches)
    }
}
